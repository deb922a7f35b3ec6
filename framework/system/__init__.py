"""Files and processes of this machine: bounded readers, atomic writes, what lives and how it ends. No torch."""
