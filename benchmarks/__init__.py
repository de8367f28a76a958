"""Compares this project with other programs. README.md lists what each script measures."""
