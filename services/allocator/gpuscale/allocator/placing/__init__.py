"""Placement: the fleet as arrays, what keeps a GPU from an ask, what each policy prefers, and refusals.

Pure: time is an argument and nothing stays held. No wire, clock, loop, log or store; nothing of queues or disks. Begin with
`placer`; `constraints` and `policies` have the rules, `refusal` and `explanation` the words.
"""
