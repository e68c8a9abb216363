"""Qualification on a host with several GPUs: one command runs what there is, and reports it all.

`python tools/qualify --help` says how to run it. jobs.py says what is run and what is left out,
runner.py runs one job within its time, report.py keeps the report; child.py is what runs in a
process of its own: ranks.py checks calls, cases.py has their bytes; latency.py, clock.py and
rivals.py measure; figures.py puts together what ranks found.
"""
