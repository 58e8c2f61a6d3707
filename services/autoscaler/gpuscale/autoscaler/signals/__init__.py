"""Where signals come from: each source gives its latest value with its age, and none is asked by evaluations."""
