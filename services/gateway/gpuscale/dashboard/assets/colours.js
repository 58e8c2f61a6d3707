// A chart is drawn with the colours of the mode that the page has then; NiceGUI looks at them once. NIGHT is set by the page.
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
