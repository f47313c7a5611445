"""Figures as pictures and pages: a step, a plan, a schedule, failures, the calculator, and the guide.

Each file makes one page or one picture from figures that lab/analysis computes, with the parts of reporting/pages.
"""
