"""tools.census"""
