// A page whose visitor is signed in no more, as after a restart, would try in vain to connect again, for ever.
addEventListener("load", () => window.socket.io.on("reconnect_error", async () => {
  const answer = await fetch(location.href, {method: "HEAD", redirect: "manual"}).catch(() => null);
  if (answer?.type === "opaqueredirect") location.reload();
}));
