// RUN: secc opt %s -p 'normalize-loss,dce' | filecheck %s

// A term has one id in all cases, whatever comes before it. What only a parameter decides counts once: 1/B for each of B samples.

sec.graph "cases" optional ["image"] {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.symbol "n" kind "rows" key "image" dim 0
  sec.block "net" class "Net" params 10 trainable 10
  sec.block "eyes" class "Net" params 10 trainable 10
  // CHECK: sec.case "text"
  sec.case "text" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %y = sec.call "net" (%x) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    %s = sec.param "scale" : !sec.tensor<[], f32, grad>
    %l = sec.glue "aten.mean.default" (%y) args "$0" at "loss.py:3" : !sec.tensor<[], f32, grad>
    %loss = sec.glue "aten.add.Tensor" (%l, %s) args "$0, $1" : !sec.tensor<[], f32, grad>
    sec.return (%loss)
    // CHECK: [[MEAN:%[0-9]+]] = sec.glue "aten.sum.default" (%y)
    // CHECK: sec.term "loss" ([[MEAN]], {{%[0-9]+}}) at "loss.py:3"
    // CHECK: [[EACH:%[0-9]+]] = sec.glue "aten.mul.Tensor" (%s) args "$0, B"
    // CHECK: [[B:%[0-9]+]] = sec.size "B"
    // CHECK: [[SHARE:%[0-9]+]] = sec.glue "aten.reciprocal.default" ([[B]])
    // CHECK: sec.term "constant" ([[EACH]], [[SHARE]])
  }
  // CHECK: sec.case "image"
  sec.case "image" when ["image"] {
    %x2 = sec.input "x" : !sec.tensor<[B, 8], f32>
    %px = sec.input "image" : !sec.tensor<[n, 8], f32>
    %f = sec.call "eyes" (%px) args "$0" outs [""] : !sec.tensor<[n, 8], f32, grad>
    %y2 = sec.call "net" (%x2) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    %k = sec.glue "aten.mean.default" (%f) args "$0" at "loss.py:3" : !sec.tensor<[], f32, grad>
    %l = sec.glue "aten.mean.default" (%y2) args "$0" at "loss.py:3" : !sec.tensor<[], f32, grad>
    %loss = sec.glue "aten.add.Tensor" (%k, %l) args "$0, $1" : !sec.tensor<[], f32, grad>
    sec.return (%loss)
    // CHECK-DAG: [[EYES:%[0-9]+]] = sec.glue "aten.sum.default" (%f)
    // CHECK-DAG: [[MEAN:%[0-9]+]] = sec.glue "aten.sum.default" (%y2)
    // CHECK: sec.term "loss_1" ([[EYES]], {{%[0-9]+}})
    // CHECK: sec.term "loss" ([[MEAN]], {{%[0-9]+}})
  }
}
