"""The examination behind ``verl-fapo doctor``: what is installed, the machine, Ray, and a command's settings.

examination   runs every part in a process of its own, under a time limit
part          the entry of such a process
findings      what a part says
packages imports plugin machine cluster                          of every installation
command checkpoints data run_folder                              of the command whose arguments were given
"""
