"""The course command: start a chapter, run its tests, check the work. `ol --help` says how."""
