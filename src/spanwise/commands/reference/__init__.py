"""`spanwise reference`: what a policy says of a reserved token before anything is trained."""
