"""Between the core's values and the contract's messages: specs, rules, signals, decisions.

Begin with `translate`.
"""
