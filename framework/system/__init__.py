"""Files and processes of this machine: bounded readers, atomic writes, signals, process exit. No torch."""
