"""The commands there are: what `gpuscalectl --help` says of each, and the function that it is."""

from collections.abc import Mapping

from gpuscale.cli.commands.watching import GetGroup
from gpuscale.cli.console.command import Entry, ExplainGroup

COMMANDS: Mapping[str, Entry] = {
    "top": Entry("Show GPUs, reservations, endpoints, decisions and health on one screen.", "top:top"),
    "get": Entry(
        "Show nodes, GPUs, reservations, endpoints and other resources.",
        {
            "nodes": "get:nodes",
            "gpus": "get:gpus",
            "reservations": "get:reservations",
            "endpoints": "get:endpoints",
            "replicas": "get:replicas",
            "watchers": "get:watchers",
            "decisions": "get:decisions",
            "adapters": "get:adapters",
            "metrics": "get:metrics",
            "cordons": "get:cordons",
            "recordings": "get:recordings",
            "health": "get:health",
            "rules": "get:rules",
            "quotas": "get:quotas",
        },
        GetGroup,
    ),
    "explain": Entry(
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
    "events": Entry("Show what happened, oldest first.", "events:events"),
    "snapshot": Entry("Show the GPUs of one host as its agent reads them.", "get:snapshot"),
    "history": Entry("Show what nodes and GPUs did.", "recordings:history"),
    "reserve": Entry("Reserve GPUs, all or none.", "reserve:reserve"),
    "renew": Entry("Restart the leases of reservations, from now.", "reserve:renew"),
    "release": Entry("Give reservations back.", "reserve:release"),
    "run": Entry("Run a command on GPUs that are reserved while it runs.", "run:run"),
    "check": Entry("Say whether GPUs are free, and which.", "capacity:check"),
    "estimate": Entry("Estimate how many GPUs a model needs.", "capacity:estimate"),
    "rank": Entry(
        "Rank nodes by idle GPUs, and free GPUs by score.",
        {"nodes": "capacity:rank_nodes", "gpus": "capacity:rank_gpus"},
    ),
    "cordon": Entry("Close nodes or GPUs for new work; what runs there stays.", "maintenance:cordon"),
    "uncordon": Entry("Open nodes or GPUs for new work again.", "maintenance:uncordon"),
    "drain": Entry("Cordon nodes or GPUs, and ask the holders there to leave.", "maintenance:drain"),
    "clear": Entry(
        "Clear the quarantine or the fences of GPUs.",
        {"quarantine": "maintenance:clear_quarantine", "fence": "maintenance:clear_fence"},
    ),
    "driver": Entry(
        "Make an agent close the GPU driver for a while.",
        {"release": "maintenance:driver_release", "resume": "maintenance:driver_resume"},
    ),
    "record": Entry("Run a command and print what GPUs did meanwhile.", "recordings:record"),
    "start": Entry("Start recording what GPUs do.", {"recording": "recordings:start_recording"}),
    "stop": Entry("Stop a recording.", {"recording": "recordings:stop_recording"}),
    "apply": Entry("Make queue watchers and endpoints match files.", "apply:apply"),
    "diff": Entry("Show what apply would change.", "apply:diff"),
    "create": Entry("Add a rule to an endpoint.", {"rule": "endpoints:create_rule"}),
    "update": Entry("Change a rule of an endpoint.", {"rule": "endpoints:update_rule"}),
    "set": Entry("Set the quota of a tenant.", {"quota": "capacity:set_quota"}),
    "scale": Entry("Set the desired replicas of an endpoint.", {"endpoint": "endpoints:scale_endpoint"}),
    "delete": Entry(
        "Delete endpoints, rules, queue watchers, quotas or recordings.",
        {
            "endpoint": "endpoints:delete_endpoint",
            "watcher": "endpoints:delete_watcher",
            "recording": "recordings:delete_recording",
            "quota": "capacity:delete_quota",
            "rule": "endpoints:delete_rule",
        },
    ),
    "forget": Entry(
        "Give up adapters or nodes that will never come back.",
        {"adapter": "maintenance:forget_adapter", "node": "maintenance:forget_node"},
    ),
    "logs": Entry("Show what replicas wrote.", "logs:logs"),
    "wait": Entry("Wait until resources are as they should be.", "wait:wait"),
    "evaluate": Entry(
        "Say how many replicas an endpoint would get.", {"endpoint": "explain:evaluate_endpoint"}
    ),
    "preset": Entry(
        "Show the policies of known systems, as manifests.",
        {"list": "preset:list_presets", "show": "preset:show_preset"},
    ),
    "backtest": Entry("Run policies on a recorded workload.", "backtest:backtest"),
    "tune": Entry("Search for the cheapest policy that meets a goal.", "backtest:tune"),
    "up": Entry("Start everything on this machine, in one process.", "serving:up"),
    "dashboard": Entry("Serve the dashboard to browsers.", "serving:dashboard"),
    "config": Entry(
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
    "token": Entry(
        "Manage the tokens of a server, in its tokens file.",
        {
            "create": "tokens:create",
            "list": "tokens:list_tokens",
            "limit": "tokens:limit",
            "revoke": "tokens:revoke",
        },
    ),
    "certs": Entry(
        "Create your own certificate authority and certificates.",
        {"init": "certs:init", "issue": "certs:issue"},
    ),
    "completion": Entry(
        "Write the script that completes commands, options and names.", "completion:completion"
    ),
}
