"""The HTTP server: what stands between a stranger's request and the model."""
