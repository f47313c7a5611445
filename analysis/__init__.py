"""Analyses training steps before they run: what a step computes, stores and sends, and how fast it can be at best.

Two independent ways lead to these figures, and the tests compare them. Read the files in this order:

Compiled programs
    hlo.py            parses a compiled program and counts how often each instruction runs
    work.py           its FLOPs and memory traffic; calls.py: those of library calls on GPUs
    communication.py  its collectives: mesh axes, counts and bytes
    compiled.py       compiles a step and collects these figures
    topology.py       TPU slices to compile for, without TPUs

Formulas
    case.py           a step to predict: layout, model and batch
    theory.py         what the step must send
    compilers.py      where XLA:CPU and libtpu differ from theory, and constants fitted to them
    predict.py        memory, FLOPs and traffic; saved.py: activations saved for the backward pass
    timeline.py       pipeline schedules: timeline, idle time, and how often each unit runs

Both
    roofline.py       the least time of a step, from either
    explanation.py    all figures of one step, for tools/explain.py
    search.py         searches for the fastest configuration, for tools/plan.py
"""
