"""A question in, reasoning and answer out: what inference.py, server.py and the recipes share."""
