"""Methods whose formula neither the full paper nor code confirms; see the `source` of each."""
