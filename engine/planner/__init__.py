"""Makes plans: what is asked for, the limits of the machine, and the report that explains a plan."""
