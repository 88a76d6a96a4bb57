"""Methods that no primary source confirms (`source` says what each rests on)."""
