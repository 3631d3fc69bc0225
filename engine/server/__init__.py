"""The engine in service: live requests from many clients over the native engine, and what they and their operators see."""
