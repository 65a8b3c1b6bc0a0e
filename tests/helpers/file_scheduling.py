"""Give whole files to the processes of pytest-xdist, also after one of them has died."""

from xdist.scheduler import LoadFileScheduling


class FileScheduling(LoadFileScheduling):
    """What xdist 3.8.0 has, without its endless waits after a process has died (its issues 1327 and 1378).

    It gives out the finished files of that process once more, as files without tests, and the test that the process
    died of; and a new process that gets one test waits for a second.
    """

    def remove_node(self, node):
        """Return the test that a process died of, or None; give out what it has not begun before anything else."""
        units = {
            name: {test: False for test, done in unit.items() if not done}
            for name, unit in self.assigned_work.pop(node).items()
        }
        begun = next((unit for unit in units.values() if unit), None)
        if begun is None:
            return None
        fatal = next(iter(begun))
        del begun[fatal]
        for name in reversed([name for name, unit in units.items() if unit]):
            self.workqueue[name] = units[name]
            self.workqueue.move_to_end(name, last=False)
        for other in self.assigned_work:
            self._reschedule(other)
        return fatal

    def _reschedule(self, node):
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            if self.workqueue:
                self._assign_work_unit(node)
            else:
                node.shutdown()
