"""Adapter to verl 0.9: an entry point, a reward manager, and wrappers of trainers V1 and V0.

verl loads `plugin` by itself; every other module here waits for its module of verl.
"""
