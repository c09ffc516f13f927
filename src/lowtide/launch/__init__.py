"""The budget follows a run into the processes that it starts: ranks of a launcher, spawned children, shell scripts.

`lowtide run` puts what it was told into the environment (`settings.py`) and a `sitecustomize` on the path of every
Python that starts below it (`site/`). That watches for torch, and puts the process inside its budget as soon as torch
is there (`startup.py`). Each process leaves a note of how it went (`notes.py`); one that cannot be reached is named
there too (`escapes.py`). So nothing trains outside the budget without a word (R6).
"""
