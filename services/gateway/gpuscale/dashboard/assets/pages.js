// What pages do in the browser. NIGHT is set by the page.
const ZONE = Intl.DateTimeFormat().resolvedOptions().timeZone;
// A moment (milliseconds) on an axis of `seconds` from end to end, in the browser's time zone.
const moment = (at, seconds) => new Date(+at).toLocaleString("sv-SE").slice(seconds > 3600 ? 5 : 11, seconds > 3600 ? 16 : 19);
const plain = text => text.replace(/[&<>"']/g, one => `&#${one.charCodeAt()};`);
// Lets a span of time be drawn on a chart with a mouse; a finger scrolls.
const brushable = chart => {
  if (!matchMedia("(hover: hover)").matches || chart.getModel().getComponent("brush")?.brushType) return;
  chart.on("brushEnd", () => chart.dispatchAction({type: "brush", areas: []}));
  chart.dispatchAction({type: "takeGlobalCursor", key: "brush", brushOption: {brushType: "lineX", brushMode: "single"}});
};
// A chart is drawn with the colours of the mode that the page has then; NiceGUI looks at them once.
addEventListener("load", () => {
  const day = Object.fromEntries(Object.entries(NIGHT).map(([day, night]) => [night, day]));
  const repaint = (options, colours) => {
    for (const [key, value] of Object.entries(options ?? {})) {
      if (typeof value === "object") repaint(value, colours);
      else if (key === "color" && value in colours) options[key] = colours[value];
    }
  };
  let dark = document.body.classList.contains("body--dark");
  new MutationObserver(() => {
    if (dark === document.body.classList.contains("body--dark")) return;
    dark = !dark;
    for (const drawn of document.querySelectorAll(".nicegui-echart")) {
      const chart = getElement(drawn.id.slice(1));
      repaint(chart.options, dark ? NIGHT : day);
      chart.update_chart();
    }
  }).observe(document.body, {attributeFilter: ["class"]});
});
