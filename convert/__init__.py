"""Checkpoints in, checkpoints out. This file imports nothing, so that --help stays fast."""
