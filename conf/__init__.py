"""Hydra groups, one per extension point; a node's file name is its module's name."""
