"""meshwright's framework: meshes, stages, schedules, ZeRO, resharding. Start reading at ``framework/train.py``."""
