"""Adapter to verl 0.9: an entry point, a reward manager, trainer modes for V1 and a wrapper for V0.

verl loads `plugin` by itself; nothing here is imported before the module of verl that it belongs to.
"""
