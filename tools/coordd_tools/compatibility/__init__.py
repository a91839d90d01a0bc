"""What of Horovod's public interface there is here, as a generated page: ``docs/horovod-compatibility.md``."""
