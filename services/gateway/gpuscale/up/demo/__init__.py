"""`gpuscalectl up --demo`: a fleet that lives. Hosts, people and workers are made up; the services that serve them are real.

Begin with `app`: who is there, and what happens. `hosts` reports figures as agents do, `people` reserve GPUs as holders do, `workers`
runs replicas as adapters do. Which load, name and moment comes next follows from the seed; a day can pass faster than a day.
"""
