// Arranges the cards of sections as a graph: from left to right where there is room, else from top to bottom,
// and as a list of cards and arrows in words where that is too wide, too.
"use strict";
(() => {
  const graph = document.querySelector(".graph");
  const cards = [...graph.querySelectorAll("[data-card]")], edges = [...graph.querySelectorAll("[data-source]")];
  const stage = document.createElement("div");
  stage.className = "stage";
  stage.append(...graph.childNodes);
  graph.append(stage);
  const wires = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  wires.setAttribute("aria-hidden", "true");
  stage.prepend(wires);
  
  const arrange = (direction) => {
    const layout = new libraries.Graph({ multigraph: true });
    layout.setGraph({ rankdir: direction, nodesep: 28, ranksep: direction === "LR" ? 36 : 26, edgesep: 16, marginx: 4, marginy: 4 });
    layout.setDefaultEdgeLabel(() => ({}));
    for (const card of cards) layout.setNode(card.dataset.card, { width: card.offsetWidth, height: card.offsetHeight });
    edges.forEach((edge, i) => {
      const label = edge.classList.contains("bare") ? { width: 0, height: 0 } : { width: edge.offsetWidth + 12, height: edge.offsetHeight + 6 };
      layout.setEdge(edge.dataset.source, edge.dataset.target, { ...label, labelpos: "c" }, `${i}`);
    });
    libraries.layout(layout);
    return layout;
  };

  const place = () => {
    const room = graph.clientWidth;
    graph.classList.add("placed");
    let layout = arrange("LR");
    if (layout.graph().width > room) layout = arrange("TB");
    const isList = layout.graph().width > room;
    const { width, height } = layout.graph();
    graph.classList.toggle("placed", !isList);
    wires.toggleAttribute("hidden", isList);
    if (isList) {
      for (const element of [stage, ...cards, ...edges]) element.removeAttribute("style");
      return;
    }
    stage.style.width = `${width}px`;
    stage.style.height = `${height}px`;
    for (const card of cards) {
      const at = layout.node(card.dataset.card);
      card.style.left = `${at.x - at.width / 2}px`;
      card.style.top = `${at.y - at.height / 2}px`;
    }
    wires.setAttribute("width", width);
    wires.setAttribute("height", height);
    wires.replaceChildren();
    const draw = libraries.select(wires);
    const curve = libraries.line((p) => p.x, (p) => p.y).curve(libraries.curveBasis);
    const head = (tip, from) => {
      const angle = (Math.atan2(tip.y - from.y, tip.x - from.x) * 180) / Math.PI;
      draw.append("path").attr("class", "wire-head").attr("d", "M0,0L-9,-4.5L-9,4.5Z")
        .attr("transform", `translate(${tip.x},${tip.y}) rotate(${angle})`);
    };
    edges.forEach((edge, i) => {
      const { points, x, y } = layout.edge(edge.dataset.source, edge.dataset.target, `${i}`);
      draw.append("path").attr("class", "wire").attr("d", curve(points));
      head(points.at(-1), points.at(-2));
      if (edge.dataset.twoWay !== undefined && !edge.classList.contains("bare")) head(points[0], points[1]);
      edge.style.left = `${x - edge.offsetWidth / 2}px`;
      edge.style.top = `${y - edge.offsetHeight / 2}px`;
    });
  };
  page.drawWhenever(graph, place);
})();
