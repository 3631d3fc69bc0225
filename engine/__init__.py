"""What executes plans: a simulated engine here, real ones beside it."""
