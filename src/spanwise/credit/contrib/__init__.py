"""Methods whose formulas no primary source confirms; what each rests on is its `source`."""
