"""`spanwise reference`: the probability of a reserved token before anything is trained."""
