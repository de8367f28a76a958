"""Recipes that apply the GRPO loop to other actors than a single reasoning model.

A recipe may import `rlm` and the scripts of the project, but never another recipe.
"""
