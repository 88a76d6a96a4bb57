"""Methods whose formula neither the full paper nor its authors' code confirms. Each method names its `source`."""
