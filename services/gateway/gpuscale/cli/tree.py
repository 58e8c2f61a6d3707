"""The commands there are: what `gpuscalectl --help` says of each, and the function that it is."""

from collections.abc import Mapping

from gpuscale.cli.commands.watching import GetGroup
from gpuscale.cli.console.command import CommandEntry, ExplainGroup, JobGroup

COMMANDS: Mapping[str, CommandEntry] = {
    "top": CommandEntry("Show GPUs, reservations, endpoints, decisions and health on one screen.", "top:top"),
    "status": CommandEntry("Show the fleet at a glance.", "top:status"),
    "get": CommandEntry(
        "Show nodes, GPUs, reservations, endpoints and other resources.",
        {
            "all": "overview:get_all",
            "nodes": "get:nodes",
            "gpus": "get:gpus",
            "processes": "get:processes",
            "reservations": "get:reservations",
            "jobs": "get:jobs",
            "endpoints": "get:endpoints",
            "replicas": "get:replicas",
            "watchers": "get:watchers",
            "decisions": "get:decisions",
            "adapters": "get:adapters",
            "metrics": "get:metrics",
            "certs": "certs:list_certificates",
            "cordons": "get:cordons",
            "recordings": "get:recordings",
            "health": "get:health",
            "rules": "get:rules",
            "quotas": "get:quotas",
            "bookings": "get:bookings",
            "backtests": "get:backtests",
        },
        GetGroup,
    ),
    "describe": CommandEntry("Show all that is known of a resource.", "describe:describe"),
    "explain": CommandEntry(
        "Explain decisions, placements, fields and exit codes.",
        {
            "endpoint": "explain:explain_endpoint",
            "decision": "explain:explain_decision",
            "exit-codes": "explain:explain_exit_codes",
            "field": "explain:explain_field",
            "reservation": "explain:explain_reservation",
            "placement": "capacity:explain_placement",
        },
        ExplainGroup,
    ),
    "events": CommandEntry("Show what happened, oldest first.", "events:events"),
    "snapshot": CommandEntry("Show the GPUs of one host as its agent reads them.", "get:snapshot"),
    "topology": CommandEntry("Show how near the GPUs and network cards of a node are.", "topology:topology"),
    "history": CommandEntry("Show what nodes and GPUs did.", "recordings:history"),
    "reserve": CommandEntry("Reserve GPUs, all or none.", "reserve:reserve"),
    "renew": CommandEntry("Restart the leases of reservations, from now.", "reserve:renew"),
    "release": CommandEntry("Give reservations back.", "reserve:release"),
    "run": CommandEntry("Run a command on GPUs that are reserved while it runs.", "run:run"),
    "check": CommandEntry("Say whether GPUs are free, and which.", "capacity:check"),
    "estimate": CommandEntry("Estimate how many GPUs a model needs.", "capacity:estimate"),
    "rank": CommandEntry(
        "Rank nodes by idle GPUs, and free GPUs by score.",
        {"nodes": "capacity:rank_nodes", "gpus": "capacity:rank_gpus"},
    ),
    "cordon": CommandEntry("Close nodes or GPUs for new work; what runs there stays.", "maintenance:cordon"),
    "uncordon": CommandEntry("Open nodes or GPUs for new work again.", "maintenance:uncordon"),
    "drain": CommandEntry("Cordon nodes or GPUs, and ask the holders there to leave.", "maintenance:drain"),
    "clear": CommandEntry(
        "Clear the quarantine or the fences of GPUs.",
        {"quarantine": "maintenance:clear_quarantine", "fence": "maintenance:clear_fence"},
    ),
    "driver": CommandEntry(
        "Make an agent close the GPU driver for a while.",
        {"release": "maintenance:driver_release", "resume": "maintenance:driver_resume"},
    ),
    "record": CommandEntry("Run a command and print what GPUs did meanwhile.", "recordings:record"),
    "start": CommandEntry("Start recording what GPUs do.", {"recording": "recordings:start_recording"}),
    "stop": CommandEntry(
        "Stop a job, a recording or a backtest.",
        {
            "job": "jobs:stop",
            "recording": "recordings:stop_recording",
            "backtest": "backtest:stop_backtest",
        },
        JobGroup,
    ),
    "apply": CommandEntry("Make queue watchers and endpoints match files.", "apply:apply"),
    "diff": CommandEntry("Show what apply would change.", "apply:diff"),
    "edit": CommandEntry(
        "Change an endpoint or a queue watcher in your editor.",
        {"endpoint": "apply:edit_endpoint", "watcher": "apply:edit_watcher"},
    ),
    "create": CommandEntry("Add a rule to an endpoint.", {"rule": "endpoints:create_rule"}),
    "update": CommandEntry("Change a rule of an endpoint.", {"rule": "endpoints:update_rule"}),
    "set": CommandEntry("Set the quota of a tenant.", {"quota": "capacity:set_quota"}),
    "scale": CommandEntry(
        "Set the desired replicas of an endpoint.", {"endpoint": "endpoints:scale_endpoint"}
    ),
    "delete": CommandEntry(
        "Delete endpoints, rules, queue watchers, quotas, bookings, recordings or backtests.",
        {
            "endpoint": "endpoints:delete_endpoint",
            "watcher": "endpoints:delete_watcher",
            "recording": "recordings:delete_recording",
            "quota": "capacity:delete_quota",
            "booking": "reserve:delete_booking",
            "rule": "endpoints:delete_rule",
            "backtest": "backtest:delete_backtest",
        },
    ),
    "forget": CommandEntry(
        "Give up adapters or nodes that will never come back.",
        {"adapter": "maintenance:forget_adapter", "node": "maintenance:forget_node"},
    ),
    "logs": CommandEntry("Show what replicas and jobs wrote.", "logs:logs"),
    "adopt": CommandEntry("Reserve the GPUs that running processes use.", "adopt:adopt"),
    "attach": CommandEntry("Follow a job until it ends.", "jobs:attach"),
    "wait": CommandEntry("Wait until resources are as they should be.", "wait:wait"),
    "evaluate": CommandEntry(
        "Say how many replicas an endpoint would get.", {"endpoint": "explain:evaluate_endpoint"}
    ),
    "preset": CommandEntry(
        "Show the policies of known systems, as manifests.",
        {"list": "preset:list_presets", "show": "preset:show_preset"},
    ),
    "backtest": CommandEntry("Run policies on a recorded workload.", "backtest:backtest"),
    "tune": CommandEntry("Search for the cheapest policy that meets a goal.", "backtest:tune"),
    "up": CommandEntry("Start everything on this machine, in one process.", "serving:up"),
    "dashboard": CommandEntry("Serve the dashboard to browsers.", "serving:dashboard"),
    "config": CommandEntry(
        "Manage contexts: servers by name.",
        {
            "get-contexts": "config:get_contexts",
            "current-context": "config:current_context",
            "use-context": "config:use_context",
            "set-context": "config:set_context",
            "delete-context": "config:delete_context",
            "view": "config:view",
        },
    ),
    "token": CommandEntry(
        "Manage the tokens of a server, in its tokens file.",
        {
            "create": "tokens:create",
            "list": "tokens:list_tokens",
            "limit": "tokens:limit",
            "rotate": "tokens:rotate",
            "revoke": "tokens:revoke",
        },
    ),
    "certs": CommandEntry(
        "Manage your own certificate authority and certificates.",
        {
            "init": "certs:init",
            "issue": "certs:issue_client",
            "list": "certs:list_certificates",
            "renew": "certs:renew",
            "revoke": "certs:revoke",
            "rotate-ca": "certs:rotate_ca",
        },
    ),
    "init": CommandEntry("Set up the services on this host, for others to join.", "hosts:init"),
    "join-token": CommandEntry(
        "Manage the tokens with which hosts join.",
        {"create": "join_tokens:create", "list": "join_tokens:list_tokens", "delete": "join_tokens:delete"},
    ),
    "join": CommandEntry("Get a certificate and settings for this host.", "hosts:join"),
    "login-code": CommandEntry("Let people log in once.", {"create": "login:create"}),
    "login": CommandEntry("Log in at a server, by a code or an OIDC provider.", "login:login"),
    "logout": CommandEntry("Delete what login wrote.", "login:logout"),
    "leave": CommandEntry("Take away what join wrote on this host.", "hosts:leave"),
    "upgrade": CommandEntry("Restart this host's units in order, by a newer gpuscale.", "upgrade:upgrade"),
    "doctor": CommandEntry(
        "Find what is wrong with this host and the fleet, and what to do.", "doctor:doctor"
    ),
    "support-bundle": CommandEntry(
        "Collect logs, settings without secrets and the state of the fleet in one file.",
        "doctor:support_bundle",
    ),
    "version": CommandEntry("Show the versions of this program and of the servers.", "overview:version"),
    "api-resources": CommandEntry("List the kinds of resources.", "overview:api_resources"),
    "completion": CommandEntry(
        "Write the script that completes commands, options and names.", "completion:completion"
    ),
}

OF_OTHER_TOOLS: Mapping[str, str] = {
    "dmon": "history NAME (or top)",
    "exec": "run -- COMMAND",
    "gpustat": "status (or top)",
    "kill": "stop job NAME",
    "list": "get TYPE",
    "ls": "get TYPE",
    "nvidia-smi": "get gpus -o wide (or top)",
    "nvitop": "top",
    "nvtop": "top",
    "patch": "edit TYPE NAME (or apply -f FILE)",
    "pmon": "top",
    "ps": "get jobs",
    "sacct": "get reservations --since 1d",
    "sattach": "attach NAME",
    "salloc": "reserve --gpus N",
    "sbatch": "run -d --gpus N -- COMMAND",
    "scancel": "stop job NAME (or release NAME)",
    "scontrol": "describe reservation NAME",
    "sinfo": "get nodes",
    "smi": "get gpus -o wide (or top)",
    "squeue": "get reservations (or get jobs)",
    "srun": "run --gpus N -- COMMAND",
    "sprio": "get quotas",
    "sshare": "get quotas",
    "tail": "logs -f JOB",
}
"""Words of kubectl, Slurm, Docker and nvidia-smi that people type out of habit, and what says the same here."""
