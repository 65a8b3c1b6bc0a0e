"""Compile a training step for devices that need not be here, and report what it takes."""
