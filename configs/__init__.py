"""Configurations of named runs, one file each; ``clusters/`` describes hardware."""
