"""`gpuscalectl up`: everything in one process. The only room that knows all the others."""
