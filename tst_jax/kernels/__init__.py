"""The two hot operations of the method, on every platform; README.md beside this says more."""
