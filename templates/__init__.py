"""Jinja2 templates of everything that secc writes for people to read."""
