"""Analyses training steps before they run: what a step computes, stores and sends, and how fast it can be at best.

Two independent ways lead to these figures, and the tests compare them. Read the files in this order:

Compiled programs
    hlo.py            parses a compiled program and counts how often each instruction runs
    work.py           its FLOPs and memory traffic; calls.py: those of library calls on GPUs
    communication.py  its collectives: mesh axes, counts and bytes
    origins.py        the lines of source behind them, and those that XLA warns of
    compiled.py       compiles a step and collects these figures
    overlap.py        which communication is hidden behind kernels, and which is exposed
    spans.py          what kernels and links do when, as rows to draw
    topology.py       TPU slices and GPU clusters to compile for, without having them; gpus.py: the kinds of GPUs
    links.py          how fast their devices can send to one another

Formulas
    case.py           a step to predict: layout, model and batch; weights.py: the model's weights
    theory.py         what the step must send; activations.py: the part that devices send to share products
    update.py         what its optimizer stores, computes and sends
    compilers.py      where the compilers differ from theory, and constants fitted to them
    memory.py         memory; saved.py: activations saved for the backward pass
    predict.py        FLOPs, traffic and time; pairs.py: pairs of a query and a key
    host.py           what is in the host's memory, and the time to move it
    timeline.py       pipeline schedules: timeline, idle time, and how often each unit runs

Both
    roofline.py       the least time of a step, from either; reached.py: what a step is expected to take
    explanation.py    all figures of one step, for tools/explain.py; fixes.py: changes that make it fit into memory
    excess.py         where a compiled step sends more than theory says
    search.py         searches for the fastest configuration, for tools/plan.py; shapes.py: models by size alone

Recorded steps, for tools/profile.py
    trace.py          what each device ran, and when
    profile.py        where the time went: operations, collectives, waiting

Simulated jobs, for tools/failures.py
    failures.py       a long job on hosts that fail: where its time goes
"""
