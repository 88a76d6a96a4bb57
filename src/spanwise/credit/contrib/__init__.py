"""Methods that no primary source confirms (`source` says what each rests on), and functions to call that no trainer here runs."""
