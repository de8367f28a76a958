"""Ours against its peers, side by side in one run. README.md says what each script measures."""
