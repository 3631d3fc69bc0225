"""C++ of the CPU: sources, and how they are built on first use."""
