"""Recipes that apply GRPO to more than a single model: to agents, and to lessons in a prompt.

A recipe may import `rlm` and the scripts of the project, but never another recipe.
"""
