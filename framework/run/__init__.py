"""One run on disk: its directory and lock, saving and resuming, signals, and the files it keeps."""
