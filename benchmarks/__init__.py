"""Benchmarks of this project against its peers. README.md lists what each script measures."""
