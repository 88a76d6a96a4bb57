"""Methods whose formula neither the full paper nor its authors' code confirms; see the `source` of each."""
