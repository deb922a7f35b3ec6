"""Operating system: atomic writes, bounded readers, this process. No torch."""
