"""Evaluation: sample, grade, accuracy with intervals, paired comparison, tables and records."""
