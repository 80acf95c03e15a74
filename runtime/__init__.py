"""What a rank runs: torch, triton and the standard library only. Importing the package itself imports none of them."""
