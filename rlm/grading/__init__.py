"""Grades a completion: finds the final answer and compares it exactly with the gold answer."""
